"""DeepSpeed's JSON config: read, checked as a whole, and described key by key."""
