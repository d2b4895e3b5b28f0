"""Measurements that are kept, and the scripts that made them."""
