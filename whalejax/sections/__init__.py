"""Tables in processes of their own, overlapped with a dense section.

``sparse_rows`` has the rows of one process and their version, ``snapshots`` stores them
in files, ``row_service`` answers requests for them; ``sparse_section`` starts such
processes and replaces failed ones, ``pipeline`` passes batches, vectors and gradients
in order through both sections, ``remote_store`` copies tables there and back.
"""
