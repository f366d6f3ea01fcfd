"""Which of the task's prompts were passed on, as rows."""
