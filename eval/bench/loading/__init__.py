"""A simulation of loads with deadlines, over links whose bandwidth changes."""
