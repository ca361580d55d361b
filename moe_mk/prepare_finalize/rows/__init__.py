"""Rows between ranks: the exchange that transports share, and sums of received rows."""
