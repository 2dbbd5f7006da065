# The novels are those of github.com/mlschmitt/classic-books-markdown at 94488272; report.json has the SHA-256 of the
# token ids of its texts. LIB is the library of CPython 3.11.7.
cat LIB/argparse.py LIB/asyncio/base_events.py LIB/difflib.py > python.txt
cuvee profile learn smollm2 -o smollm2.safetensors

# report.json
cuvee report --model smollm2 --profile smollm2.safetensors --sequences 40 --no-tasks --text pd_dracula.md \
    --text python.txt --method cuvee --method fp8-e4m3 --method kivi4 --method cachegen --method cachegen-tables-free \
    --method pca/layers:5 -o run

# promises.json, with MuSiQue's passages and documents as JSON, one per line as {"text": …}; kl=0.005 ran apart
texts="pd_dracula.md pd_emma.md multidoc.jsonl musique.jsonl python.txt"
python promises.txt smollm2 float32 smollm2.safetensors presets.json 384 8 high,balanced,small $texts
python promises.txt smollm2 float32 smollm2.safetensors kl.json 384 10 kl=0.005 $texts
