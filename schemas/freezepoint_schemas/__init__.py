"""The contract between model servers, workers and trainers: topics, records and their encodings.

Nothing here talks to a broker; a trainer or a model server may depend on this package alone.
"""
