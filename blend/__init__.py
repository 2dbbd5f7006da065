"""Position-independent reuse of cached pieces (re-rotation, token selection, selective recompute).

Not written yet: nothing here can be called. The plan is in the changelog's "Unreleased" section.
"""
