"""What a run will do, and what would stop it, said without an allocation, a GPU or any rank."""
