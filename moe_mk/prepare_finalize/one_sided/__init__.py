"""One-sided dispatch and combine between CPU processes: over shared memory, and over TCP between hosts."""
