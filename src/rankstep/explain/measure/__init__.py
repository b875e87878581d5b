"""What runs on the ranks: one file per part of the story, each returning plain numbers."""
