"""The parts that hub and peer share as processes: event loop, background tasks, events, logs, metrics, HTTP server."""
