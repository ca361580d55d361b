"""What lies outside: the device, and optional libraries, real or emulated."""
