"""Measurements of trained models: result cells, benches and peers, collected results, tables, pages, explanations."""
