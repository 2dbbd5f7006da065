# The texts are those of ../2026-11-29-smollm2-five-layers/run.sh; report.json has the SHA-256 of their token ids. MODEL is
# the hub's Qwen/Qwen2.5-Coder-1.5B-Instruct, or a folder.
texts="--text pd_dracula.md --text python.txt --text musique.jsonl --text multidoc.jsonl"

# report.json, with a profile of 64 sequences
cuvee report --model MODEL --profile qwen.safetensors --dtype bfloat16 --sequences 24 --length 1024 --no-tasks $texts \
    --method cuvee/qwen@2^-2 --method cuvee/qwen@2^-1 --method cuvee/qwen@2^0 --method cuvee/qwen@2^1 \
    --method cuvee/lossless --method fp8-e4m3 --method fp8-e4m3-unit --method kivi4 --method kivi2 --method cachegen -o run

# gsm8k_report.json, with a profile by default; fp8-e4m3-unit was measured, too, and not scored
cuvee report --model MODEL --profile qwen_default.safetensors --dtype bfloat16 --sequences 2 --length 128 \
    --method cuvee/qwen_default@balanced --method cuvee/qwen_default@small --method kivi4 \
    --task gsm8k.yaml --limit 32 -o run_gsm8k

# presets-768.json and presets-4096.json, with a profile of --quick
presets="--method cuvee/qwen_quick@high --method cuvee/qwen_quick@balanced --method cuvee/qwen_quick@small --method kivi4"
cuvee report --model MODEL --profile qwen_quick.safetensors --dtype bfloat16 --no-tasks --sequences 24 --length 1024 \
    $texts $presets -o run_768
cuvee report --model MODEL --profile qwen_quick.safetensors --dtype bfloat16 --no-tasks --sequences 8 --length 4352 \
    $texts $presets -o run_4096

# peers.json, with a profile of --quick
steps=$(for step in -2 -1 0 1 2 3; do echo --method cuvee/quick@2^$step; done)
peers=$(for peer in turboquant@4 turboquant@3 turboquant@2 kakeyalattice/d4@10 kakeyalattice/d4@38 kakeyalattice/e8@10 \
    kakeyalattice/e8@38 kivi4 kivi2 fp8-e4m3; do echo --method $peer; done)
cuvee report --model MODEL --profile quick.safetensors --dtype float32 --no-tasks --sequences 24 --length 512 \
    $texts $steps $peers -o run_peers

# pca.json, of the same sequences
cuvee report --model MODEL --dtype float32 --no-tasks --sequences 24 --length 512 $texts \
    --method pca/layer@0.18 --method pca/layer@0.4 --method pca/layer@0.9 -o run_pca

# lines.json; the quality of one sequence is measured beside, and says nothing
cuvee report --model MODEL --profile quick.safetensors --dtype float32 --sequences 1 --length 128 \
    --method cuvee/quick@balanced --method cuvee/quick@small --method kivi4 --method kivi2 --method fp8-e4m3 \
    --task cuvee_lines_100 --metadata lines=270 --limit 10 -o run_lines

# uuids.json and trec.json. KV is lost-in-the-middle's kv-retrieval-75_keys.jsonl.gz; trec.jsonl has the fields shots,
# question and type, and is not kept here: its questions were picked by hand
python - KV <<'END'
import gzip, json, sys

rows = [json.loads(line)["ordered_kv_records"] for line in gzip.open(sys.argv[1])][:2]
pairs = dict([*rows[0], *rows[1]][:120])
text = json.dumps(pairs).replace('", "', '",\n "')
with open("uuids.jsonl", "w") as file:
    for key, value in [*pairs.items()][3::6]:
        file.write(json.dumps({"pairs": text, "key": key, "begins": value.split("-")[0]}) + "\n")
END
for task in uuids_8k trec_many_shot; do
    cuvee report --model MODEL --profile quick.safetensors --dtype float32 --sequences 1 --length 128 \
        --method cuvee/quick@balanced --method cuvee/quick@small --method kivi4 --method kivi2 --method fp8-e4m3 \
        --task $task.yaml -o run_$task
done

# musique.json: QUESTIONS is CacheBlend's inputs/musique_s.json; LongBench's metric needs jieba, fuzzywuzzy and rouge
python - QUESTIONS <<'END'
import json, sys

with open("musique_tasks.jsonl", "w") as file:
    for row in json.load(open(sys.argv[1])):
        context = "\n\n".join(passage["text"] for passage in row["ctxs"])
        file.write(json.dumps({"context": context, "question": row["question"], "answers": row["answers"]}) + "\n")
END
cuvee report --model MODEL --profile quick.safetensors --dtype float32 --sequences 1 --length 128 \
    --method cuvee/quick@balanced --method cuvee/quick@small --method kivi4 --method kivi2 --method fp8-e4m3 \
    --task musique.yaml --limit 8 -o run_musique
