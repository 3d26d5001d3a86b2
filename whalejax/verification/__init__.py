"""Plans held against the compiler that would run them, with no device at hand.

``targets`` says what can be compiled for, ``processes`` runs ``worker`` in a process of
its own and ends it in time, ``comparison`` sets what the plan predicts beside what the
compiled program does, and ``report`` is how that reads.
"""
