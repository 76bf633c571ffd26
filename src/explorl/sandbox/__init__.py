"""Where code runs that nobody has read: programs that a model wrote (`programs`), the cells that it has run while it
thinks (`interpreter`), and judges of its answers (`sealed`).

It knows nothing of tasks. docs/security.md says what it stops.
"""
