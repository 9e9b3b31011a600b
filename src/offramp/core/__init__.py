"""The packed loop: one batch type, one attention, one place where layers are iterated."""
