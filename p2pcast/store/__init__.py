"""What is kept on disk, crash-safe by construction."""
