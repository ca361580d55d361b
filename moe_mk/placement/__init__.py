"""Which rank holds which expert, and how to balance them."""
