"""What a layer costs before anything is built: floors of time and bytes."""
