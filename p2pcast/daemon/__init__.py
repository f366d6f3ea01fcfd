"""What daemons share: the HTTP server with its access rules and connection limits, requests to it, and user code."""
