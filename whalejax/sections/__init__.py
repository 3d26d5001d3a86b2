"""Tables in processes of their own, beside a dense section that works meanwhile.

``sparse_rows`` has the rows of one process and their version, ``snapshots`` keeps them
in files, ``row_service`` answers for them; ``sparse_section`` starts such processes
and replaces those that die, ``pipeline`` brings batches, vectors and gradients in
order through both sections, ``remote_store`` brings tables there and back.
"""
