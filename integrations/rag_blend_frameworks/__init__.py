"""What the integrations share: prompts, chat templates, call arguments, threads. Knows no framework; not public."""
