"""Compressors: what is sent of a bucket. Each file has one, with its public function."""
