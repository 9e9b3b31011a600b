"""From what a user can afford to a method's settings."""
