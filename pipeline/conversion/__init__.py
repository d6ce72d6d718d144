"""From a DeepSpeed checkpoint of any layout to a Hugging Face folder, verified against the model that trained."""
