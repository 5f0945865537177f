// SPDX-License-Identifier: MIT
//! The conformance vectors of the project's tests/vectors, which every language runs.
mod common;
use common::{sha256, Json};
use sparseattn::{Axes, Context, Extent, Gradients, Pattern, Problem, Saved, View, ViewMut};
use std::collections::BTreeMap;

fn vectors(name: &str) -> Option<Json> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../tests/vectors/");
    let Ok(text) = std::fs::read_to_string(format!("{folder}{name}")) else {
        eprintln!("SKIPPED: this is not a checkout of the project, so there are no vectors");
        return None;
    };
    let vectors = Json::parse(&text);
    assert!(vectors.items().len() > 20);
    Some(vectors)
}

#[test]
fn digests() {
    assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

#[test]
fn patterns_keep_the_pairs_of_every_vector() {
    common::open();
    for vector in vectors("patterns.json").iter().flat_map(Json::items) {
        let pattern: Pattern = vector.text("text").parse().unwrap();
        let extent = Extent::new(vector.size("seq_q"), vector.size("seq_k"))
            .batch(vector.size("batch"))
            .heads(vector.size("heads"))
            .q_offset(vector.integer("q_offset"));
        assert_eq!(sha256(&pattern.to_mask(extent).unwrap()), vector.text("sha256"), "{pattern} on {extent:?}");
        assert_eq!(pattern.stats(extent).unwrap().pairs, vector.get("pairs").unwrap().number(), "{pattern}");
    }
}

#[test]
fn attention_of_every_vector() {
    let context = common::context();
    for vector in vectors("attention.json").iter().flat_map(Json::items) {
        for reference in [false, true] {
            run(vector, &context, reference);
        }
    }
}

fn shape_of(vector: &Json, name: &str) -> Vec<usize> {
    if name.ends_with("sink_logits") {
        return vec![vector.size("heads_q")];
    }
    let name = name.strip_prefix('d').unwrap_or(name);
    let (heads, seq) = if name == "k" || name == "v" { ("heads_kv", "seq_k") } else { ("heads_q", "seq_q") };
    let mut shape = vec![vector.size("batch"), vector.size(heads), vector.size(seq)];
    match name {
        "lse" => {}
        "v" | "out" => shape.push(vector.size("head_dim_v")),
        _ => shape.push(vector.size("head_dim")),
    }
    shape
}

fn run(vector: &Json, context: &Context, reference: bool) {
    let number = |name: &str| vector.get(name).map(Json::number);
    let has_sink = vector.get("sink_logits").is_some();
    let problem =
        Problem::new(vector.size("batch"), vector.size("heads_q"), vector.size("seq_q"), vector.size("head_dim"))
            .heads_kv(vector.size("heads_kv"))
            .seq_k(vector.size("seq_k"))
            .head_dim_v(vector.size("head_dim_v"))
            .axes(Axes::Bhsd)
            .scale(number("scale").unwrap())
            .q_offset(vector.integer("q_offset"))
            .softcap(number("softcap").unwrap_or(0.0))
            .backward(true)
            .reference(reference)
            .sink_logits(has_sink);
    let plan = context.plan(&vector.text("text").parse().unwrap(), &problem).unwrap();

    let values = |name: &str| -> Vec<f32> {
        let expected = vector.get(name).map_or(&[][..], Json::items);
        expected.iter().map(|number| number.number() as f32).collect()
    };
    let inputs: BTreeMap<&str, Vec<f32>> =
        ["q", "k", "v", "dout", "dlse", "sink_logits"].map(|name| (name, values(name))).into();
    let mut results: BTreeMap<&str, Vec<f32>> =
        ["out", "lse", "dq", "dk", "dv", "dsink_logits"].map(|name| (name, vec![f32::NAN; values(name).len()])).into();
    let view = |name: &str| View::new(&inputs[name], &shape_of(vector, name)).unwrap();
    let mut take = |name: &'static str| results.remove(name).unwrap();
    let (mut out, mut lse, mut dsink) = (take("out"), take("lse"), take("dsink_logits"));
    let (mut dq, mut dk, mut dv) = (take("dq"), take("dk"), take("dv"));

    let out_view = ViewMut::new(&mut out, &shape_of(vector, "out")).unwrap();
    let lse_view = ViewMut::new(&mut lse, &shape_of(vector, "lse")).unwrap();
    let mut forward = plan.forward(view("q"), view("k"), view("v"), out_view).lse(lse_view);
    if has_sink {
        forward = forward.sink_logits(view("sink_logits"));
    }
    forward.run().unwrap();

    let saved = Saved {
        q: view("q"),
        k: view("k"),
        v: Some(view("v")),
        out: View::new(&out, &shape_of(vector, "out")).unwrap(),
        lse: View::new(&lse, &shape_of(vector, "lse")).unwrap(),
    };
    let gradients = Gradients {
        dq: ViewMut::new(&mut dq, &shape_of(vector, "q")).unwrap(),
        dk: ViewMut::new(&mut dk, &shape_of(vector, "k")).unwrap(),
        dv: Some(ViewMut::new(&mut dv, &shape_of(vector, "v")).unwrap()),
    };
    let mut backward = plan.backward(saved, view("dout"), gradients);
    if vector.get("dlse").is_some() {
        backward = backward.dlse(view("dlse"));
    }
    if has_sink {
        let heads = shape_of(vector, "dsink_logits");
        backward = backward.sink_logits(view("sink_logits")).dsink_logits(ViewMut::new(&mut dsink, &heads).unwrap());
    }
    backward.run().unwrap();

    let results = [("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv), ("dsink_logits", dsink)];
    for (name, got) in results {
        let expected: Vec<f64> =
            vector.get(name).map_or(vec![], |list| list.items().iter().map(Json::number).collect());
        // dq and dk are scale times a difference of f32 numbers, whose own rounding the scale makes larger.
        let finite = expected.iter().filter(|x| x.is_finite()).map(|x| x.abs());
        let size = finite.fold(number("scale").unwrap().abs().max(1.0), f64::max);
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().map(|x| *x as f64).zip(expected) {
            let is_near = got == expected || (got - expected).abs() <= 2e-5 * expected.abs() + 2e-6 * size;
            assert!(is_near, "{name} of {}: {got}, expected {expected}", vector.text("text"));
        }
    }
}
