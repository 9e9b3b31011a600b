"""The model folder, its operating points, and text in → predictions out."""
