"""Tasks: prompts, plays with a sampler, and rewards. A user's task is one class in one file."""
