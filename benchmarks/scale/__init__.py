"""What start-up, files and lists cost at the sizes of a thousand ranks and a trillion tokens
(docs/scale.md)."""
