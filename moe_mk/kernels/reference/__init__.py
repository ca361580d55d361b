"""The specification of every op, in plain torch."""
