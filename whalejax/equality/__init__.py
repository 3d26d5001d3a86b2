"""A plan at reduced sizes, run and compared with one device: ``wh.check``.

``check_plan`` is the entry point; ``check_worker`` runs in a separate process, on
virtual CPU devices.
"""
