"""What a crash leaves on a disk, and processes that crash where they are told to."""
