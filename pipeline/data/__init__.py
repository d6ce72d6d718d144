"""From texts as users have them to the samples that training draws.

Each package uses only those before it.

`sources` reads documents, `corpus` stores tokens, `tokenizer` turns a document into ids, `tokenize`
runs that over a whole corpus, and `dataset` draws samples from the result.
"""
