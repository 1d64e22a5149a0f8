"""What only callers of DeepSpeed's names use; `names.table` says under which of its paths each part is found."""
