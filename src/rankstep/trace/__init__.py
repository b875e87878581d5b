"""What happened in a step, as plain records."""
