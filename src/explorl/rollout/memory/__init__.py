"""Where keys and values are stored while sequences are decoded, and how attention reads them.

On a GPU, and wherever memory is short: `page_memory` manages the pages, `pages` stores them, `triton_attention` reads
them. On a CPU: `spans` manages the spans, `slots` and `joined` store them, `sharing` decodes samples that are still
identical as one row, `cached_attention` reads them.
"""
