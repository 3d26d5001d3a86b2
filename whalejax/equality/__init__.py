"""A plan at reduced sizes, run and compared with one device: ``wh.check``.

``check_plan`` is the entry point; ``check_worker`` runs in a separate process, on
virtual CPU devices. There ``mesh_reduction`` and ``role_sizes`` choose the sizes,
``reduced_model`` converts the user's loss to them (``resized_program`` if its code has
fixed sizes), ``reduced_plan`` the plan, ``index_bounds`` and ``random_data`` make
numbers, and ``one_device`` is the reference.
"""
