"""``wh.check``: runs a plan at reduced sizes, and compares it with one device.

``check_plan`` starts ``check_worker``, a process with virtual CPU devices.
"""
