"""Everything that writes Hugging Face folders, or loads one as users do."""
