"""Imitations of the libraries that the transports are written for, over the ranks' group, for tests."""
