//! The list of the graphs to join, as a command line or the parameter `join` writes it.
//!
//! A word is a file or the name of a built-in graph, `NAME=` may stand before it, and options of a built-in graph follow it:
//! `fbank:kaldi num_mel_bins=80 encoder.onnx`.

use crate::builtin::builtin_names;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedGraph {
    pub name: String,
    pub from: GraphFrom,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GraphFrom {
    File(String),
    Builtin { graph: String, options: Vec<String> },
}

/// Reads the words of a list. An error says what is expected.
pub fn graphs<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Vec<ListedGraph>, String> {
    let mut listed: Vec<ListedGraph> = Vec::new();
    for word in words {
        // A path may have the sign as well.
        let named = word.split_once('=').filter(|(name, _)| !name.contains(['/', '.']));
        let source = named.map_or(word, |(_, source)| source);
        let is_builtin = builtin_names().any(|known| known == source);
        if let (Some(ListedGraph { from: GraphFrom::Builtin { options, .. }, .. }), Some(_)) =
            (listed.last_mut(), named)
            && !is_builtin
            && !source.ends_with(".onnx")
        {
            options.push(word.to_owned());
            continue;
        }
        let name = match named {
            Some((name, _)) => name,
            None if is_builtin => source.split(':').next().unwrap_or_default(),
            None => stem(source),
        };
        // Files whose names have a colon end with .onnx.
        if source.contains(':') && !is_builtin && !source.ends_with(".onnx") {
            let known = builtin_names().collect::<Vec<_>>().join(", ");
            return Err(format!("'{source}' is no built-in graph: {known} are; the name of a file ends with .onnx"));
        }
        if source.is_empty() {
            return Err(format!("a file or a built-in graph is expected, as in NAME=FILE, not '{word}'"));
        }
        let from = if is_builtin {
            GraphFrom::Builtin { graph: source.to_owned(), options: Vec::new() }
        } else {
            GraphFrom::File(source.to_owned())
        };
        listed.push(ListedGraph { name: name.to_owned(), from });
    }
    Ok(listed)
}

fn stem(path: &str) -> &str {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').map_or(name, |(stem, _)| if stem.is_empty() { name } else { stem })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<ListedGraph> {
        graphs(text.split_whitespace()).unwrap()
    }

    fn file(name: &str, path: &str) -> ListedGraph {
        ListedGraph { name: name.to_owned(), from: GraphFrom::File(path.to_owned()) }
    }

    fn builtin(name: &str, graph: &str, options: &[&str]) -> ListedGraph {
        let options = options.iter().map(|&option| option.to_owned()).collect();
        ListedGraph { name: name.to_owned(), from: GraphFrom::Builtin { graph: graph.to_owned(), options } }
    }

    #[test]
    fn files_have_the_name_that_is_written_or_their_own() {
        let expected = [file("encoder", "a/encoder.onnx"), file("joint", "x.int8.onnx"), file("c=d", "a/c=d.onnx")];
        assert_eq!(read("a/encoder.onnx joint=x.int8.onnx a/c=d.onnx"), expected);
    }

    #[test]
    fn options_belong_to_the_built_in_graph_before_them() {
        let expected = [builtin("fbank", "fbank:kaldi", &["num_mel_bins=40", "high_freq=-400"]), file("e", "x.onnx")];
        assert_eq!(read("fbank:kaldi num_mel_bins=40 high_freq=-400 e=x.onnx"), expected);
        let expected = [builtin("a", "stft", &["hop=128"]), builtin("b", "istft", &[]), builtin("istft", "istft", &[])];
        assert_eq!(read("a=stft hop=128 b=istft istft"), expected);
    }

    #[test]
    fn a_name_without_a_file_is_refused() {
        assert!(graphs(["encoder="]).unwrap_err().contains("not 'encoder='"));
        let error = graphs(["fbank:kaldy"]).unwrap_err();
        assert!(error.starts_with("'fbank:kaldy' is no built-in graph: fbank:kaldi, mel:nemo,"), "{error}");
        assert_eq!(read("a=b:c.onnx"), [file("a", "b:c.onnx")]);
    }
}
