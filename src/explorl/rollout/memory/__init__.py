"""Where keys and values lie while rows are decoded, and how a row attends to them.

On a GPU, and wherever memory is short: `page_memory` says whose the pages are, `pages` holds them, `triton_attention`
reads them. On a CPU: `spans` says whose the stretches are, `slots` and `joined` hold them, `sharing` decodes samples
that are still the same as one row, `attention` reads them.
"""
