"""What tests of this library and of its plugins share."""
