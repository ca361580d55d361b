"""Access to the device and to optional libraries, real or emulated."""
