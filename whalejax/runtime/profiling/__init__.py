"""Steps that ran, measured beside what was predicted of them."""
