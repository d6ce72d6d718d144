"""SmolLM2-135M-Instruct, a real chat model, learns Korean."""
