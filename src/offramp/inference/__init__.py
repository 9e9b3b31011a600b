"""Run folders, operating points, budgets, and the predictor: text in, predictions out."""
