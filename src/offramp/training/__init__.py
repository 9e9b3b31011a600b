"""The one trainer."""
