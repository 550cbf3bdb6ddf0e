"""From files to micro-batches: `readers` and `formats` read records, `encoder` tokenizes them,
`packing` makes batches."""
