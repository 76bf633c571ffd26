"""Where keys and values are stored while sequences are decoded, and how attention reads them.

On a GPU, and wherever memory is short: `page_memory` manages the pages, `pages` stores them, `triton_attention` reads
them. On a CPU: `span_memory` manages the rows and decodes samples that are still identical as one, `spans` stores them.
`cache` has what both share.
"""
