"""From records under results/ to numbers, tables and pages of the documents.

Open `blocks` first: it lists every generated table. `markers` fills them into a document, `stored` reads the records.
The script is `benchmarks/make_results.py`.
"""
