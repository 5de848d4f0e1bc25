"""From rows to queries, and from judged groups to batches."""
