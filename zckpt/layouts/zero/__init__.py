"""DeepSpeed's own files: ZeRO-1, -2, -3, the bf16 optimizer, and runs without ZeRO; read and written."""
