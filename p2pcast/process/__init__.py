"""What every p2pcast process needs: an event loop, background tasks, logs, events, metrics and shortage handling."""
